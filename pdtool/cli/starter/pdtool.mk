# Rules of make that take any NAME.py through pdtool's four steps; only what is stale is made again: after a change of
# NAME.py, or of the options. A change of NAME.py that leaves its operators as they are, such as another learning rate,
# leaves profile, plan and stage files, and trains again; the earlier run is kept, under a name with the time.
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

# What a rule is asked for, in a file that changes only when that does: with other options all is made again.
define pdtool_asked
@mkdir -p $(@D); printf '%s\n' '$(subst ','\'',$1)' | cmp -s - $@ || printf '%s\n' '$(subst ','\'',$1)' > $@
endef

.SECONDEXPANSION:
.PHONY: .pdtool_always
.PRECIOUS: profiles/%.json plans/%.yaml plans/%/bundle.yaml profiles/.%.options profiles/.%.checked plans/.%.options runs/.%.options

vpath %.py $(MODELS)

profiles/.%.options: .pdtool_always
	$(call pdtool_asked,$(PROFILE))

plans/.%.options: .pdtool_always
	$(call pdtool_asked,$(PARTITION))

runs/.%.options: .pdtool_always
	$(call pdtool_asked,$(RUN))

# A profile that holds is left as it is, and so is what was made from it; that it was looked at is noted beside it.
profiles/.%.checked: %.py profiles/.%.options | $(PDTOOL_NEEDS)
	$(PDTOOL) profile $< $(PROFILE) --if-stale -o profiles/$*.json
	@touch $@

profiles/%.json: profiles/.%.checked %.py | $(PDTOOL_NEEDS)
	@test -f $@ || $(PDTOOL) profile $(word 2,$^) $(PROFILE) -o $@

plans/%.yaml: profiles/$$(call pdtool_name,$$*).json plans/.%.options | $(PDTOOL_NEEDS)
	$(PDTOOL) partition $< --topology $(call pdtool_topology,$*) $(PARTITION) -o $@

plans/%/bundle.yaml: plans/%.yaml | $(PDTOOL_NEEDS)
	$(PDTOOL) codegen $<

runs/%/report.json: plans/%/bundle.yaml $$(call pdtool_name,$$*).py runs/.%.options | $(PDTOOL_NEEDS)
	@if [ -e $@ ]; then kept=$(@D).$$(date +%Y%m%d-%H%M%S); mv $(@D) $$kept; echo "kept the earlier run as $$kept" >&2; fi
	$(PDTOOL) run plans/$*.yaml -o $(@D) $(RUN)
