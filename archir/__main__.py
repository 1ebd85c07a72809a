"""`python -m archir`"""

from archir.cli import main

main()
