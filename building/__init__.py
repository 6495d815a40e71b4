"""What setup.py does: finds the compilers and torch, and has ninja build what they are needed for."""
