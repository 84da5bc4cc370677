"""`headstart compare`: cells (recipe × settings × seed) trained at equal budget, then decoded alike.

config.py    what a comparison's file holds
cells.py     the file → cells, each with the recipe that it trains
data.py      the samples of cells, made once for those that read the same data; steps for a number of positions
checks.py    refuses what a cell cannot do, and plans time and memory, before the first cell starts
work.py      trains and measures cells in one process, which loads the target once
team.py      several such processes, on several GPUs or several on one
worker.py    the entry point of one of them
rows.py      what was measured, one row per cell
page.py      the rows as a table, a plot and a page
"""
