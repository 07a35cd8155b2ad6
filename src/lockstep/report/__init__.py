"""Run folders: written while a run goes on, read back as a terminal view, plots and a page."""
