"""Scaling laws: what size of model and how many tokens a budget is best spent on, as a family of
published laws.
"""
