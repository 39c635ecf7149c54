"""`llmsys doctor pairs`: every pair of choices of a step, compared with a plain step."""
