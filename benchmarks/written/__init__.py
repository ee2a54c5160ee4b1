"""Steps as people first write them, and as an expert writes them."""
