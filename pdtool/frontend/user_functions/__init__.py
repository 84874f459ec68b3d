"""The functions of a user's model.py, called and checked."""
