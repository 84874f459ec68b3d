"""What plans and runs look like: drawings as SVG, and the page that `pdtool report` writes."""
