"""Steps as people first write them, beside the same steps as an expert writes them."""
