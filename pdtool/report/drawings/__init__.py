"""Drawings as SVG text, of the width that is asked for; the page, `--svg` and the documentation share them."""
