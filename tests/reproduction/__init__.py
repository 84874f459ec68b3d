"""What `make reproduce` measures, and the page that it writes."""
