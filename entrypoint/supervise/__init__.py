"""Parent processes of ranks."""
