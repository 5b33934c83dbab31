"""``make stored-answers``: compute the stored answers again. Commit the result alone and say why it changed."""

from tests.stored_answers.store import compute, write

write(compute())
