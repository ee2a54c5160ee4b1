"""Train by local updates with workers that may be lost and come back."""
