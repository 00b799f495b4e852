return { elsewhere = "rope_spec.lua" }
