"""``cloudckpt demo``: a small GPT is trained, killed in the middle of a save, and resumed.

Read ``train.py`` first: it is what a training script with cloudckpt looks like. ``run.py`` tells
the story around it; the other modules are its props.
"""
