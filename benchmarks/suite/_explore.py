
import math, torch, kronfac
import kronfac.rescale.factors as F, kronfac.rescale.rules as R, kronfac.step.pipeline as P, kronfac.step.updates as U
SHRINK = {}
def patched(o):
    o = dict(o)
    rel = o.pop("relative", None)
    if rel is not None: o["damping"] = kronfac.Relative(rel)
    polar = o.pop("polar", None)
    if polar == "all":
        def rule_of(layer, rescale, sequences):
            if rescale != "auto": return R_rule(layer, rescale, sequences)
            if layer.unit_wise: return "graft"
            if layer.picks_columns: return "columns"
            return "orthogonal"
        P.rule_of = rule_of
    norms = o.pop("norms", None)
    if norms is not None:
        def graft_factors(updates):
            out=[]
            for u in updates:
                norm = u.after.norm()
                out.append(F._ratio(torch.full_like(norm, norms*math.sqrt(u.after.numel())), norm))
            return out
        F.graft_factors = graft_factors
    SHRINK.clear()
    if "shrink" in o: SHRINK["p"] = o.pop("shrink")
    if "shrink_kind" in o: SHRINK["kind"] = o.pop("shrink_kind")
    return o
R_rule = R.rule_of
class Wrapped:
    def __init__(self, opt):
        self.o=opt; self.n=0
        self.groups=[[x for x in st.layer.parameters] for st in opt.layers]
        known={x for g in self.groups for x in g}
        self.rest=[x for g in opt.param_groups for x in g["params"] if x not in known]
        if self.rest: self.groups.append(self.rest)
        self.m={}; self.v={}
    @property
    def param_groups(self): return self.o.param_groups
    def zero_grad(self): self.o.zero_grad()
    @torch.no_grad()
    def step(self):
        p, kind = SHRINK["p"], SHRINK.get("kind","layer")
        mu=0.9; self.n+=1; c=1-mu**self.n
        fs=[]; M=V=0.0
        for i,g in enumerate(self.groups):
            g2=m2=0.0
            for x in g:
                if x.grad is None: continue
                self.m[x]=x.grad.clone()*(1-mu) if x not in self.m else self.m[x].mul_(mu).add_(x.grad,alpha=1-mu)
                g2+=float(x.grad.square().sum()); m2+=float(self.m[x].square().sum())
            self.v[i]=mu*self.v.get(i,0.0)+(1-mu)*g2
            r2=(m2/c/c)/max(self.v[i]/c,1e-38); fs.append(min(1.0,r2)); M+=m2; V+=self.v[i]
        if kind=="global": fs=[min(1.0,(M/c/c)/max(V/c,1e-38))]*len(fs)
        before={x:x.clone() for g in self.groups for x in g}
        self.o.step()
        for f,g in zip(fs,self.groups):
            for x in g: x.copy_(before[x]+(f**(p/2))*(x-before[x]))
        self.last=fs
def wrapped(opt): return Wrapped(opt) if SHRINK else opt
