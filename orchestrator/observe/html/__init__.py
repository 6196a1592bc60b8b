"""Building blocks of the pages that lastgood makes: markup that escapes by itself, tables, charts, and one style.

A page is one file without requests to anywhere: style and script are inside it, charts are inline SVG. What comes from
a run (names, errors, paths) is text that anybody may have written; see `markup`.
"""
