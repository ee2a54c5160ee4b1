"""Order a module's instructions, inside XLA and before it compiles."""
