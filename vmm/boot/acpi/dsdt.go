package acpi

// deviceChanged is the notification value of the generation-id device: "the
// generation id has changed" in its specification, a device-specific value.
const deviceChanged = 0x80

// definitions is the DSDT's byte code.
func definitions(c Config) aml {
	var devices []aml
	for n := range c.CPUs {
		devices = append(devices, processor(n))
	}
	if c.Serial.Port != 0 {
		devices = append(devices, serialPort(c.Serial))
	}
	for i, d := range c.Virtio {
		devices = append(devices, virtioDevice(i, d))
	}
	if c.GenerationID.Address != 0 {
		devices = append(devices, generationID(c.GenerationID), eventDevice(c.GenerationID))
	}
	if c.PVPanic != 0 {
		devices = append(devices, panicNotifier(c.PVPanic))
	}
	code := scope(segment("_SB"), devices...)
	if c.Power.SleepControl != 0 {
		code = join(code, named(segment("_S5"),
			pack(integer(sleepTypeOff), integer(0), integer(0), integer(0))))
	}
	return code
}

// processor is what Linux registers a CPU by since 6.11; without it the CPU runs
// but is missing in sysfs. Its unique id is that of the MADT's entry.
func processor(n int) aml {
	return device(numbered("C", n),
		named(segment("_HID"), text("ACPI0007")),
		named(segment("_UID"), integer(uint64(n))))
}

func serialPort(s Serial) aml {
	return device(segment("COM1"),
		named(segment("_HID"), eisaID("PNP0501")),
		named(segment("_UID"), integer(1)),
		named(segment("_CRS"), resources(ports(s.Port, 8), edgeInterrupt(s.IRQ))))
}

func virtioDevice(i int, d VirtioDevice) aml {
	return device(numbered("VR", i),
		named(segment("_HID"), text("LNRO0005")),
		named(segment("_UID"), integer(uint64(i))),
		named(segment("_CCA"), integer(1)), // DMA is coherent
		named(segment("_CRS"), resources(memoryWindow(d.Base, d.Size), edgeInterrupt(d.GSI))))
}

// generationID is the device of Microsoft's "Virtual Machine Generation ID". The
// id that its specification asks for has more characters than ACPI allows, so
// the short form that Linux knows comes first.
func generationID(g GenerationID) aml {
	address := pack(integer(g.Address&0xffffffff), integer(g.Address>>32))
	return device(segment("VGEN"),
		named(segment("_HID"), text("FKVM0001")),
		named(segment("_CID"), pack(text("VMGENCTR"), text("VM_Gen_Counter"))),
		named(segment("_DDN"), text("VM_Gen_Counter")),
		named(segment("ADDR"), address))
}

// eventDevice turns the generation id's interrupt, the only one that it has, into
// its notification, section 5.6.9. It is one of the first things that a clone does,
// so the method does not look at the interrupt's number. A name of one segment is
// looked for in the enclosing scopes too.
func eventDevice(g GenerationID) aml {
	return device(segment("GED"),
		named(segment("_HID"), text("ACPI0013")),
		named(segment("_UID"), integer(0)),
		named(segment("_CRS"), resources(edgeInterrupt(g.GSI))),
		method(segment("_EVT"), 1, notify(segment("VGEN"), deviceChanged)))
}

func panicNotifier(port uint16) aml {
	return device(segment("PEVT"),
		named(segment("_HID"), text("QEMU0001")),
		named(segment("_STA"), integer(0xf)), // present, enabled, shown, working
		named(segment("_CRS"), resources(ports(port, 1))))
}
