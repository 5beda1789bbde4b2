"""Answers that try to hang, crash or fool a grader."""

WRONG_FOR_SEVEN = (
    *(r"2^{99999}+1", r"8000!/7999!", r"\binom{8000}{4000}", r"(((10!)!)!)!", "9**9**9**9"),
    *(r"\sum_{k=1}^{300}\sum_{j=1}^{300}kj", r"\sum_{k=1}^{10^{12}} k", r"\prod_{k=1}^{300}k^{k}"),
    *(r"e^{e^{e^{e^x}}}", r"\sin(10^{50000})", r"2^{2^{40}}\pi", r"\pi^{\pi^{\pi^{\pi}}}"),
    *(r"\sqrt[999]{2^{999999}}", r"\cosh(\cosh(\cosh(9)))", r"1+10^{-9000}\pi", "1e999999999"),
    *("(1+" * 39 + "1" + ")" * 39, r"\sqrt{2+" * 39 + "1" + "}" * 39, "x^" * 30 + "2"),
    *("+".join(f"x_{{{i}}}" for i in range(150)), "+".join(f"\\sin({i}x)" for i in range(80))),
    r"\begin{pmatrix}" + r"\\".join("&".join("1" * 6) for _ in range(6)) + r"\end{pmatrix}^{9999}",
    *("(x-1)" * 100 + ">0", "|x-1|+|x-2|+|x-3|>5", ",".join(f"{i}\\pi" for i in range(60))),
    *(r"\pm1\pm2\pm3\pm4\pm5", r"\cup".join(f"({i},{i}.5)" for i in range(40))),
    *("1" * 1990, "0." + "3" * 1900, "1 " * 900, "1," * 900, "9,999" * 300, "7!" * 500),
    *("a" * 1900, "一" * 1900, "½" * 1900, "²" * 1900, "√" * 1900, "٣" * 1900),
    *("$" * 1900, "-" * 1900, "\\" * 1900, "|" * 200, "'" * 1900, "{" * 1900, "(" * 1900),
    *(r"\text{" * 300, r"\left(" * 300, "a_{" * 300, r"\frac" * 400, r"\sqrt" * 400, "f(" * 300),
    *("0.1(1)" * 300, "i" * 1900, "||x|" * 60, r"\log_2" * 40 + "x", r"7 \bmod 0"),
    *("1 " * 50_000, "{" * 100_000, r"\boxed{" * 14_000, "7" * 100_000),
)

CODE = (
    '__import__("os").system("touch pwned")',
    'open("pwned", "w").write("x")',
    r'open("pwned","w") and "\pi"',
    '[open("pwned","w")]',
    r"\input{/etc/passwd}",
    r"\write18{touch pwned}",
    r"\immediate\openout3=pwned",
    "lambda: 7",
    "7 if 1 else 0",
    "7)+(0",
    "0)&(0",
    "().__class__.__mro__",
    "exit()",
    "7;import os",
    "{7:7}",
    "f'{7}'",
)
