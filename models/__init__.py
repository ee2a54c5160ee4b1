"""Trainers a reader can learn from; run them from the checkout: python -m models.train_gpt.

Also train_moe (experts), train_vit (images) and train_long (a sequence split over devices).
"""
