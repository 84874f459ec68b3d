"""Output for people and scripts: notes, tables, drawings, progress, and the files that commands write."""
