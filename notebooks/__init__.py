"""Notebooks for learners, and what runs them: ``python -m notebooks.run``."""
