"""A schedule for people: its figures, as text, picture, page and program."""
