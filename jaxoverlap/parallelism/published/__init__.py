"""Published models and training runs that the form takes by name."""
