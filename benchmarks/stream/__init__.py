"""Images per second from JPEG files to normalized batches, compared with other loaders."""
