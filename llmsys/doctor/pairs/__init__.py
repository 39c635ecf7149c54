"""`llmsys doctor pairs`: every pair of choices that can change a step, compared with a plain
step.
"""
