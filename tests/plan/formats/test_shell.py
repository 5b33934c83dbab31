"""Launch scripts: what bash would expand, and errors for what only a run would tell."""

import pytest

from cdmpp.errors import FieldError
from cdmpp.plan.formats import import_request
from cdmpp.plan.formats.shell import Unknown
from cdmpp.plan.formats.text import options, overrides

MODEL = """--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50304
    --micro-batch-size 4 --global-batch-size 64 --pipeline-model-parallel-size 4"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('A="\n --x 4\n --fp16\n"\nrun $A', "4"),
        ("A=$(( 2048*2 ))\nrun --x $A", "4096"),
        ("a=1; b=2; run --x=$a$b", "12"),
        ("export A=3 B='4 5'; run --x \"${B}\" --y $A", "4 5"),
        ('A=(--x "1 2" # note\n\n --y)\nA+=(--x "3 4")\nrun "${A[@]}"', "3 4"),
        ("A=(5 6)\nrun --x ${A[1]}", "6"),
        ("run --x ${A:-${B:-7}} $@", "7"),
        ("run --x ${1:-8}", "8"),
        (": ${A:=9}\nrun --x $A", "9"),
        ("run \\\n  --x \\\n  10 2>&1 | tee log --x 11", "11"),
        ("N=7; M=2; run --x $((N/M + N%M - 2**M * -1 + (1<<3)))", "16"),
        ("cat <<'EOF' > f\n--x \"3\nEOF\nrun --x 12 > out.txt", "12"),
        ("srun bash -c \"run --x '1 3'\"", "1 3"),
        ("cd a && export A=14 && run --x $A", "14"),
        ("for f in a b; do echo $f; done\nif [ -f x ]; then mkdir y; fi\nrun --x 15", "15"),
        ("if [ $R = 0 ]; then run --x 16 --y 1; else run --x 16 --y 2; fi", "16"),
        ("run='go --x 17'; eval $run", "17"),
        ("A=1\\\n8\nrun --x $A", "18"),
        ("[ $B ] && C=1\nA=19\nrun --x $A", "19"),
        ("run --x $((16#1000))", "4096"),
        ("x1000=7; N=0x10; run --x $((0x1000 + N - 010 + 10#08 + x1000))", str(0x1000 + 16 - 8 + 8 + 7)),
        ("A=20\n(A=512; source env.sh; case a in a) A=1;; esac; echo warm)\nrun --x $A", "20"),
        ("(A=21; run --x $A)", "21"),
        ("A=1\nsource env.sh\nA=22\nrun --x $A", "22"),
        ("A=23\nbash -c 'source env.sh'\nrun --x ${A:-1}", "23"),
        *(
            (f"A=24\n{line}\nrun --x ${{A:-1}}", "24")
            for line in ("source activate torch", ". $V/bin/activate", ". ~/.bashrc")
        ),
    ],
)
def test_values_are_those_of_bash(text: str, value: str) -> None:
    assert options(text)["x"] == value and not isinstance(options(text)["x"], Unknown)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("A=$(nproc)\nrun --x $A", r"`\$\(nproc\)` \(line 1\).*output of a command"),
        ("run --x `nproc`", "output of a command"),
        ("\nrun --x $A", r"`\$A` \(line 2\).*A is not assigned"),
        ("run --x ${A}8", "A is not assigned"),
        ("run --x=$1", "argument 1 of the script"),
        ("A=4\nif [ $B ]; then\n  A=8\nfi\nrun --x $A", "`if` of line 2"),
        ("case $1 in\n 7B) A=3;;\n *) A=4;;\nesac\nrun --x $A", "`case` of line 1"),
        ('[ -z "$A" ] && B=3 || B=4\nrun --x $B', "`&&` of line 1"),
        ("for A in 1 2; do run --x $A; done", "`for` of line 1"),
        ("f() { A=3; }\nf\nrun --x $A", "function f"),
        ("if [ $R ]; then run --x 1; else run --x 2; fi", "`if` of line 1"),
        ("A=a.b\nrun --x ${A%.*}", "form of expansion is not read"),
        ("run --x $((1/0))", "arithmetic"),
        ("run --x $((2**63))", "arithmetic"),
        ("read A\nrun --x $A", "`read` sets it"),
        ("run --x $((1#1))", "arithmetic"),
        ("run --x $((08))", "arithmetic"),
        ("run --x $((16 # 1))", "arithmetic"),
        ("A=4\necho 8 | A=5\nrun --x $A", r"`\|` of line 2"),
        ("A=4\necho 8 | { B=1; A=5; }\nrun --x $A", r"`\|` of line 2"),
        ("[ $B ] && { C=1; A=5; }\nrun --x $A", "`&&` of line 1"),
        ("source env.sh\nrun --x ${A:-512}", r"`source env\.sh` \(line 1\) may set it"),
        ("A=512; . ./$E\nrun --x $A", r"`\. \./\$E` \(line 1\) may set it"),
        ("[ -f e ] && source e\nA+=5\nrun --x $A", r"`source e` \(line 1\) may set it"),
        ("source env.sh\nbash -c 'run --x $((A))'", r"`source env\.sh` \(line 1\) may set it"),
    ],
)
def test_what_a_run_decides_is_an_error_where_it_counts(script: str, says: str) -> None:
    text = script.replace("run", "torchrun pretrain_gpt.py").replace("--x", "--num-query-groups")
    model = MODEL + " --group-query-attention"
    with pytest.raises(FieldError, match=says) as error:
        import_request("megatron", f"{text}\nsrun pretrain_gpt.py {model}", "split", device="t4")
    assert error.value.path == "--num-query-groups"
    # The same is no error where no field of the request depends on it.
    unused = text.replace("--num-query-groups", "--save")
    found = import_request("megatron", f"{unused}\nsrun pretrain_gpt.py {MODEL}", "split", device="t4")
    assert "--save" in found.ignored


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run --x $MORE_ARGS", "MORE_ARGS is not assigned"),
        ('A="--x 1"\nif [ $B ]; then A+=" --y"; fi\nrun $A', "`if` of line 2"),
        ('if [ $A ]; then X=--y; else X="--z 3"; fi\nrun p.py --x 4 $X', "`if` of line 1"),
        ("run --x=4 $(cat moe.txt)", "output of a command"),
        ('A=(--y)\n[ $B ] && A+=(--z)\nrun --x 4 "${A[@]}"', "`&&` of line 2"),
        ('mapfile -t A < f\nrun --x 4 "${A[@]}"', "`mapfile` sets it"),
        ('for y in a b; do A+=(--$y); done\nrun --x 4 "${A[@]}"', "`for` of line 1"),
        ("run --x 4 $(a)$(b)", "output of a command"),
        ('ARGS=(a --y)\nrun --x "${ARGS[@]:1}"', "form of expansion is not read"),
        ("run --x ${MOE_ARGS%--z}", "form of expansion is not read"),
        ("run 'x", "' of line 1 has no end"),
        ("run $(x", r"\$\( of line 1 has no end"),
        ("A=(1 2", r"\( of line 1 has no end"),
        ("A=xxxxxxxxxx\n" + "A=$A$A$A$A\n" * 30, "more than 1,000,000 characters"),
        ("run --x " + "${A:-" * 500 + "}" * 500, "nested too deeply"),
        ("A=1\n" + "#\n" * 200_000 + "A+=(b)\n" * 2000 + "run " + "x " * 200_000 + "--y", "1,000,000 characters"),
    ],
)
@pytest.mark.timeout(60)
def test_texts_that_cannot_be_read_are_refused(text: str, says: str) -> None:
    with pytest.raises(FieldError, match=says):
        options(text)


def test_options_in_a_variable_reach_the_request() -> None:
    script = f'GPT="\n{MODEL} --save $1 --fp16\n"\ntorchrun --nproc_per_node $N pretrain_gpt.py $GPT'
    found = import_request("megatron", script.replace("$N", "8"), "split", device="t4")
    assert len(found.request["ranks"]) == 4 and "--save" in found.ignored
    assert any("--tensor-model-parallel-size 1" in note for note in found.notes)
    with pytest.raises(FieldError, match="N is not assigned"):
        import_request("megatron", script, "split", device="t4")


def test_verl_scripts_have_no_silent_defaults() -> None:
    line = (
        "python3 -m verl.trainer.main_ppo data.max_response_length=${long} data.train_batch_size='${data.n}' data.n=64"
    )
    found = import_request("verl", f"long=$((1024 * 8))\n{line}", "rl")
    assert found.request["lengths"]["max_tokens"] == 8192 and found.request["samples_per_step"] == 64
    (note,) = (note for note in found.notes if "veRL's defaults" in note)
    assert "data.max_prompt_length 512" in note and "data.max_response_length" not in note
    with pytest.raises(FieldError, match="long is not assigned") as error:
        import_request("verl", line, "rl")
    assert error.value.path == "data.max_response_length"
    with pytest.raises(FieldError, match="MORE is not assigned"):
        overrides("python3 -m verl.trainer.main_ppo data.n=1 $MORE")
    with pytest.raises(FieldError, match="MORE is not assigned"):
        overrides("python3 -m verl.trainer.main_ppo --config-path=c $MORE data.n=1")
    nested = (
        "trainer: {nnodes: 2, n_gpus_per_node: '${oc.select:trainer.gpus,4}'}\ndata: {train_batch_size: '${oc.env:N}'}"
    )
    with pytest.raises(FieldError, match=r"oc\.env"):
        import_request("verl", nested, "rl")
    assert import_request("verl", nested.replace("${oc.env:N}", "8"), "rl").request["generation_units"] == 4
