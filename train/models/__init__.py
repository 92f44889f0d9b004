"""Models by name, and what changes or inspects them."""
