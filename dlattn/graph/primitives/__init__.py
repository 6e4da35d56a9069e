"""Graphs of primitive operations: their nodes, what they infer, and the attention among them."""
