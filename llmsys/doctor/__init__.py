"""Checks of promises on the user's machine: parity, crashes, and which document was in which
step.
"""
