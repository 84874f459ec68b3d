# Rules of make that take any NAME.py through pdtool's four steps. They remake a file only if NAME.py or the options have
# changed. If a change of NAME.py leaves its operators as they are, such as another learning rate, they keep profile, plan
# and stage files, and only train again. They keep the earlier run under a name that contains the time.
#
#   make -f $(pdtool makefile) plans/mymodel-4x4.yaml              profile mymodel.py, and plan it for 4x4 workers
#   make -f $(pdtool makefile) plans/mymodel-4x4/bundle.yaml       and write its stage files
#   make -f $(pdtool makefile) runs/mymodel-4x4/report.json        and train
#
# Or include them in your own Makefile, and set variables before that:
#
#   PROFILE = --threads 1 --batch-size 64
#   plans/mymodel-4x4.yaml: PARTITION = --bandwidth 10Gbit/s,12GB/s
#   include $(shell pdtool makefile)
#
# The defaults in your project's pdtool.toml or pyproject.toml apply here too. An interrupted run is not made again:
# continue it with `pdtool run -o runs/mymodel-4x4 --resume`, or remove its folder.

PDTOOL ?= pdtool
MODELS ?= . models# folders to search for NAME.py
PROFILE ?=# options of pdtool profile, partition and run
PARTITION ?=
RUN ?=
PDTOOL_NEEDS ?=# targets to make before pdtool runs, such as a virtual environment

# plans/NAME-TOPOLOGY.yaml: the topology follows the last dash, so NAME may contain dashes
pdtool_topology = $(lastword $(subst -, ,$1))
# A file of PARTITION has a topology of its own
pdtool_cluster = $(if $(filter --cluster%,$(PARTITION)),,--topology $(call pdtool_topology,$*))
pdtool_name = $(patsubst %-$(call pdtool_topology,$1),%,$1)

# Write a command's options, and its defaults in pdtool.toml or pyproject.toml, into a file that changes only when they
# change. Other options then remake everything. Defaults are a table [run] or lines such as run.epochs = 3.
pdtool_table = \(tool *\. *pdtool *\. *\)\{0,1\}$1 *
define pdtool_asked
@mkdir -p $(@D); { printf '%s\n' '$(subst ','\'',$2)'; for file in pdtool.toml pyproject.toml; do \
sed -n -e '/^ *\[ *$(pdtool_table)\]/,/^ *\[/p' -e '/^ *$(pdtool_table)[.=]/p' $$file 2>&-; done; true; } > $@.new; \
if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
endef

.SECONDEXPANSION:
.PHONY: .pdtool_always
.PRECIOUS: profiles/%.json plans/%.yaml plans/%/bundle.yaml
.PRECIOUS: profiles/.%.options profiles/.%.checked plans/.%.options plans/.%.checked runs/.%.options

vpath %.py $(MODELS)

profiles/.%.options: .pdtool_always
	$(call pdtool_asked,profile,$(PROFILE))

plans/.%.options: .pdtool_always
	$(call pdtool_asked,partition,$(PARTITION))

runs/.%.options: .pdtool_always
	$(call pdtool_asked,run,$(RUN))

# Keep a profile that is not stale, and everything made from it. A file beside it records that it was checked. Files that
# the options name, such as those of a device or a cluster, are looked at, too.
profiles/.%.checked: %.py profiles/.%.options $$(wildcard $$(PROFILE)) | $(PDTOOL_NEEDS)
	$(PDTOOL) profile $< $(PROFILE) --if-stale -o profiles/$*.json
	@touch $@

profiles/%.json: profiles/.%.checked %.py | $(PDTOOL_NEEDS)
	@test -f $@ || $(PDTOOL) profile $(word 2,$^) $(PROFILE) -o $@

# Keep a plan that is not stale, such as one from git, whose date says nothing, or one that you edited.
plans/.%.checked: profiles/$$(call pdtool_name,$$*).json plans/.%.options $$(wildcard $$(PARTITION)) | $(PDTOOL_NEEDS)
	$(PDTOOL) partition $< $(pdtool_cluster) $(PARTITION) --if-stale -o plans/$*.yaml
	@touch $@

plans/%.yaml: plans/.%.checked profiles/$$(call pdtool_name,$$*).json | $(PDTOOL_NEEDS)
	@test -f $@ || $(PDTOOL) partition $(word 2,$^) $(pdtool_cluster) $(PARTITION) -o $@

plans/%/bundle.yaml: plans/%.yaml | $(PDTOOL_NEEDS)
	$(PDTOOL) codegen $<

# A run that missed its target has a report, but is not done: the report gets an early date, so make trains again.
runs/%/report.json: plans/%/bundle.yaml $$(call pdtool_name,$$*).py runs/.%.options | $(PDTOOL_NEEDS)
	@if [ -e $@ ]; then kept=$(@D).$$(date +%Y%m%d-%H%M%S); mv $(@D) $$kept; echo "kept the earlier run as $$kept" >&2; fi
	$(PDTOOL) run plans/$*.yaml -o $(@D) $(RUN) || { code=$$?; touch -c -d @0 $@; exit $$code; }
