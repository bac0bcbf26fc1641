"""`pellucid verify`: proves that what is served equals the model's own forward, position by position.

serving.py     runs sequences through the engine's parts: scheduler, paged cache, operators
reference.py   what the logits should be: the user's forward, or the textbook's attention in float64
watching.py    what passes through a model's parts, to find where two of them part
checks.py      the phases that are compared, and what is said of them
cli.py         the command
"""
