"""The first race: what hides communication, on hosts whose links are slow."""
