"""What the user says: tensors, attention nodes, and the graphs that hold them."""
