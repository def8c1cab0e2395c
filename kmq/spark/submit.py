"""The script for spark-submit: runs a pipeline with the arguments of `kmq pipeline run`, on spark-submit's master.

    spark-submit --master k8s://https://… --conf … \\
        local:///opt/kmq/app/kmq/spark/submit.py archive --topics orders --to /archive
"""

import os
import sys

if __name__ == "__main__":
    # Python searches the script's directory first: `import format` or `import sql` would find modules of this package.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    from kmq.cli.app import main

    sys.argv[1:1] = ["pipeline", "run"]
    main()
