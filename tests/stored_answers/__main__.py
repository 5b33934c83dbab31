"""``make stored-answers`` computes the stored answers again. Commit them alone and say why they changed."""

from tests.stored_answers.store import compute, write

write(compute())
