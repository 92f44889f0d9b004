"""Parents that outlive a rank."""
