"""Arithmetic over the config: parameters, operations and memory before anything starts. No
torch.
"""
