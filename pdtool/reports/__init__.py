"""Show plans and runs: sentences, drawings as SVG, and the page that `pdtool report` writes.

Other folders use `page`, and for one sentence or drawing `sentences`, `figures`, `chart`, `graph_drawing` and
`timeline_drawing`.
"""
