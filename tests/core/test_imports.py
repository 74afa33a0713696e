"""What importing core and the policies loads."""

import subprocess
import sys


def test_core_loads_no_heavy_package_and_no_other_part_of_carpool():
    code = (
        "import sys, carpool.core.scheduler, carpool.core.draft, carpool.core.codec\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'numpy', 'scipy', 'click', 'rich', 'fastapi', 'starlette', 'sqlalchemy', 'asyncio', 'socket')))\n"
        "print(sorted(m for m in sys.modules if m.startswith('carpool.') and not m.startswith('carpool.core')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]


def test_policies_load_no_heavy_package():
    code = "import sys, carpool.policies; print([m for m in ('torch', 'numpy', 'click', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
