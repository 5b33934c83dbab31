"""``python -m cdmpp``: the command line."""

from cdmpp.cli.main import main

if __name__ == "__main__":
    main()
