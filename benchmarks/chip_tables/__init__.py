"""Make the tables of the chips whose measurements are published."""
