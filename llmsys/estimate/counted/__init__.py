"""Model types that are counted and not trained: parameters, operations and bytes of weights from
their config.json.
"""
