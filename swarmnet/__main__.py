from swarmnet.cli import main

main()
