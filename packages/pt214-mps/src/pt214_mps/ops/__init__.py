"""Operators: argument checks, registration, gradients, and the definition in plain PyTorch."""
