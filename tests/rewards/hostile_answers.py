"""Answers that cost time or memory, break a parser, or look like code, and a process that scores them.

None of them is 73. The process has limits of memory and CPU time, because the library's own time limit may
get lost: its signal can raise its exception in a place that ignores exceptions.
"""

from __future__ import annotations

import resource
import signal
import sys

from dora.rewards.base import load_reward, score_one

MEMORY_BYTES = 4 * 2**30
CPU_S = 3  # of one answer
SPEED = 40  # the library's time limits are shorter by this factor

HOSTILE = {
    # powers and factorials
    "power": r"10^{1000000000}",
    "power tower": r"9^{9^{9^{9}}}",
    "tall tower": "^{".join(["2"] * 60) + "}" * 59,
    "power of a power": r"((10^{1000})^{1000})^{1000}",
    "negative power": r"2^{-1000000000}",
    "fractional power": r"2^{0.5^{0.5^{0.5^{1000000000}}}}",
    "power of a fraction": r"(\frac{1}{3})^{100000000}",
    "plain power": "9**9**9**9",
    "plain tower": "9^9^9^9^9",
    "long exponent": "7^{" + "9" * 300 + "}",
    "modulus of a power": r"3^{10^{15}} \mod 7",
    "factorial": r"1000000000!",
    "factorial of a factorial": "((9!)!)!",
    "many factorials": "9" + "!" * 50,
    "binomial": r"\binom{10^{9}}{5 \cdot 10^{8}}",
    "gamma": r"\Gamma(10^{10})",
    "exponential": r"e^{e^{e^{e^{e}}}}",
    "root": r"\sqrt[1000000]{2^{1000000}}",
    "scientific": "1e999999999",
    "negative scientific": "1e-999999999",
    "long scientific": "1e" + "9" * 400,
    "logarithm": r"\log_{10}(10^{10^{10^{10}}})",
    # long
    "digits": "9" * 1900,
    "too many digits": "9" * 100_000,
    "decimals": "0." + "3" * 1900,
    "sum": "+".join(["1"] * 900),
    "product": r" \cdot ".join(["99999"] * 150),
    "sum of fractions": "+".join(rf"\frac{{1}}{{{n}}}" for n in range(1, 130)),
    "letters": "abcdefghijklmnopqrstuvwxyz" * 70,
    "commas": "," * 1900,
    "list": ",".join(map(str, range(480))),
    "signs": "-" * 1900 + "1",
    "minus plus": "-+" * 900 + "1",
    "thousands": "1" + ",000" * 450,
    "spaces": " " * 100_000 + "5",
    "dollars": "$" * 1900,
    "percents": "%" * 100_000,
    "equals": "=" * 1900,
    "equations": "=".join(["1"] * 900),
    "names": "=".join(["x"] * 900) + "=5",
    "pluses and minuses": r"\pm 1 " * 40,
    # nested
    "parentheses": "(" * 900 + "1" + ")" * 900,
    "braces": "{" * 900 + "1" + "}" * 900,
    "brackets": "[" * 900 + "1" + "]" * 900,
    "fractions": r"\frac{1}{" * 200 + "2" + "}" * 200,
    "roots": r"\sqrt{" * 250 + "2" + "}" * 250,
    "absolute values": r"\left|" * 200 + "1" + r"\right|" * 200,
    "sines": r"\sin(" * 300 + "1" + ")" * 300,
    "subscripts": "x_{" * 500 + "1" + "}" * 500,
    "powers": "x^{" * 500 + "1" + "}" * 500,
    "texts": r"\text{" * 250 + "a" + "}" * 250,
    "boxes": r"\boxed{" * 200 + "5" + "}" * 200,
    "polynomial": "(x+1)" * 300,
    "expansion": "(x+y+z)^{1000}",
    "deep expansion": "((((x+1)^{99}+1)^{99}+1)^{99}+1)^{99}",
    # unbalanced and broken
    "open braces": "{" * 1000,
    "closed braces": "}" * 1000,
    "open parentheses": "(" * 1000,
    "open fraction": r"\frac{1}{",
    "empty fraction": r"\frac{}{}",
    "fraction without arguments": r"\frac",
    "backslash": "\\",
    "backslashes": "\\" * 1000,
    "open left": r"\left(\left(\left( 1",
    "lone right": r"\right)",
    "open environment": r"\begin{pmatrix} 1 & 2 \\ 3",
    "ragged matrix": r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}",
    "unknown command": r"\notacommand{5}",
    "definition": r"\def\x{\x\x}\x",
    "operators": "+*/^-" * 200,
    "carets": "5^^^^^5",
    "underscores": "5____5",
    "empty text": r"\text{}",
    # undefined values
    "division by zero": r"\frac{1}{0}",
    "zero by zero": r"\frac{0}{0}",
    "zero to the zero": "0^{0}",
    "infinity": r"\infty - \infty",
    "infinite product": r"0 \cdot \infty",
    "logarithm of zero": r"\log(0)",
    "imaginary": r"i^{i^{i^{i}}}",
    "nan": r"\text{nan}",
    "not a number": "nan",
    "tangent": r"\tan(\frac{\pi}{2})",
    # calculus
    "integral": r"\int_{0}^{\infty} e^{-x^{x^{x}}} dx",
    "integral without value": r"\int \sin(\sin(\sin(\sin(x)))) dx",
    "endless sum": r"\sum_{n=1}^{\infty} \frac{\sin(n^{n})}{n!}",
    "long sum": r"\sum_{n=1}^{1000000000} n^{n}",
    "long product": r"\prod_{n=1}^{1000000000} n",
    "limit": r"\lim_{x \to 0} \frac{\sin(\sin(x)) - x}{x^{100}}",
    "derivative": r"\frac{d^{1000}}{dx^{1000}} \sin(x^{x})",
    "determinant": r"\det\begin{pmatrix}"
    + r" \\ ".join(" & ".join(["x"] * 12) for _ in range(12))
    + r"\end{pmatrix}",
    "matrix power": r"\begin{pmatrix} 1 & 1 \\ 1 & 0 \end{pmatrix}^{1000000000}",
    "equation": "x^{100} + x^{99} = 5",
    "interval": r"[10^{10^{10}}, 10^{10^{11}}]",
    "set": r"\{" + ",".join(f"{n}^{{{n}}}" for n in range(100, 300)) + r"\}",
    # characters
    "null": "\0",
    "control characters": "".join(map(chr, range(1, 32))),
    "lone surrogate": "\ud800",
    "byte order mark": "\ufeff7",
    "right to left": "\u202e27",
    "zero width": "7\u200b\u200b3",
    "combining": "7" + "\u0301" * 1000,
    "other digits": "٧٢",
    "full width": "\uff17\uff13",
    "superscript": "7²",
    "roman": "Ⅻ",
    "emoji": "🙂" * 500,
    "minus sign": "\u221273",
    "vulgar fraction": "½",
    "infinity sign": "∞" * 100,
    # code
    "code": "__import__('os').system('true')",
    "attribute": "(1).__class__.__bases__",
    "lambda": "(lambda: 0)()",
    "format": "%s%n{0}{}",
    "markup": "<script>72</script>",
    "regular expression": "(a+)+" * 50 + "!",
}


def alarm_after_cpu_time(seconds: int) -> int:
    """In place of `signal.alarm`: a busy machine does not end a call earlier."""
    signal.setitimer(signal.ITIMER_PROF, seconds / SPEED)
    return 0


def score(names: list[str]) -> None:
    """Print the name of each answer, and then its reward."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    reward = load_reward("dora.rewards.math_verify:reward")
    assert reward("", "#### 73", answer="#### 73") == 1.0  # the first call takes longer
    signal.signal(signal.SIGPROF, lambda number, frame: signal.raise_signal(signal.SIGALRM))
    signal.alarm = alarm_after_cpu_time
    for name in names:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(usage.ru_utime + usage.ru_stime) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        print(name, end="", flush=True)
        completions = (f"#### {HOSTILE[name]}", HOSTILE[name])
        results = [score_one(reward, "", completion, {"answer": "#### 73"}) for completion in completions]
        print("", *(result.reason or result.reward for result in results), sep="\t", flush=True)


if __name__ == "__main__":
    score(sys.argv[1:])
