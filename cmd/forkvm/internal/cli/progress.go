package cli

import (
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
)

// spin does something that takes a while and shows that it goes on, where
// somebody looks.
func (a *app) spin(what string, do func() error) error {
	if !a.showsProgress() {
		return do()
	}
	p := mpb.New(mpb.WithOutput(a.Stderr), mpb.WithWidth(1), mpb.WithAutoRefresh())
	bar := p.New(1, mpb.SpinnerStyle(), mpb.BarRemoveOnComplete(),
		mpb.AppendDecorators(decor.Name(what+" "), decor.Elapsed(decor.ET_STYLE_GO)))
	err := do()
	bar.SetCurrent(1)
	p.Wait()
	return err
}

// showsProgress: on a terminal, unless it is unwanted or nobody is there.
func (a *app) showsProgress() bool {
	return a.StderrTerminal && !a.quiet && a.User.Getenv("NO_COLOR") == "" && a.User.Getenv("CI") == ""
}
