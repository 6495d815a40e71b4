"""Implements setup.py: finds the compilers and torch, and builds the libraries with ninja."""
