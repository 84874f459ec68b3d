# Rules of make that take any NAME.py through pdtool's four steps; only what is stale is made again. A change of NAME.py
# that leaves its operators as they are, such as another learning rate, leaves profile, plan and stage files.
#
#   make -f $(pdtool makefile) plans/mymodel-4x4.yaml              profile mymodel.py, and plan it for 4x4 workers
#   make -f $(pdtool makefile) plans/mymodel-4x4/bundle.yaml       and write its stage files
#   make -f $(pdtool makefile) runs/mymodel-4x4/report.json        and train
#
# Or, in a Makefile of your own, with the variables that you want to change before it:
#
#   PROFILE = --threads 1 --batch-size 64
#   plans/mymodel-4x4.yaml: PARTITION = --bandwidth 10Gbit/s,12GB/s
#   include $(shell pdtool makefile)
#
# What a project's pdtool.toml says holds here, too.

PDTOOL ?= pdtool
MODELS ?= . models# the folders in which NAME.py is looked for
PROFILE ?=# options of pdtool profile, partition and run
PARTITION ?=
RUN ?=
PDTOOL_NEEDS ?=# what must be there before pdtool is called, such as a virtual environment

# plans/NAME-TOPOLOGY.yaml: the name may have dashes itself, the topology is what follows the last one
pdtool_topology = $(lastword $(subst -, ,$1))
pdtool_name = $(patsubst %-$(call pdtool_topology,$1),%,$1)

.SECONDEXPANSION:
.PRECIOUS: profiles/%.json plans/%.yaml plans/%/bundle.yaml

vpath %.py $(MODELS)

profiles/%.json: %.py | $(PDTOOL_NEEDS)
	$(PDTOOL) profile $< $(PROFILE) --if-stale -o $@

plans/%.yaml: profiles/$$(call pdtool_name,$$*).json | $(PDTOOL_NEEDS)
	$(PDTOOL) partition $< --topology $(call pdtool_topology,$*) $(PARTITION) -o $@

plans/%/bundle.yaml: plans/%.yaml | $(PDTOOL_NEEDS)
	$(PDTOOL) codegen $<

runs/%/report.json: plans/%/bundle.yaml | $(PDTOOL_NEEDS)
	$(PDTOOL) run plans/$*.yaml -o $(@D) $(RUN)
