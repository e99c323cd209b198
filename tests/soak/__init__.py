"""The soak: frontends and owners are killed, stopped and replaced at random under load, and nothing may be wrong, lost or leaked.

`python -m tests.soak --seconds 600`. The driver is __main__.py; work.py says what is asked and what the right answers are, frontend.py asks,
records.py keeps what became of it where it survives its process, leaks.py looks at what is left behind.
"""
