"""From folders, lists and shards to image files and their classes."""
