"""Local updates: workers take many steps alone, and average what they learnt meanwhile."""
