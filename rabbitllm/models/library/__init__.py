"""The split directories of this machine: listing them, describing their models, removing them."""
